// The keys of the page. A view lists its own; none of them acts while somebody types.
import { useEffect, useRef } from "./ui.js";

const active = [];

export const listed = () => active.flatMap((box) => box.current);

// keys: [{key: "d", does: "switch dark and light", run: (event) => …}]; run may return false to leave the key to others
export function useKeys(keys) {
  const box = useRef();
  box.current = keys; // as of the latest drawing, so that a key never acts on what was true before
  useEffect(() => {
    active.push(box);
    return () => {
      active.splice(active.indexOf(box), 1);
    };
  }, []);
}

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  const typing = event.target.matches?.("input:not([type=checkbox]), textarea, select");
  if (typing && event.key !== "Escape") return;
  if (event.target.closest?.("dialog") && event.key !== "?") return;
  // what is on top acts first: a view before the page around it
  for (const box of [...active].reverse()) {
    const found = box.current.find((entry) => [entry.key].flat().includes(event.key));
    if (found && found.run(event) !== false) {
      event.preventDefault();
      return;
    }
  }
});
