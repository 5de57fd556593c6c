// The keys of the page. A view lists its own; none of them acts while somebody types.
import { useEffect } from "./ui.js";

const active = [];

export const listed = () => active.flat();

// keys: [{key: "d", does: "switch dark and light", run: (event) => …}]; hidden ones are not listed
export function useKeys(keys, deps) {
  useEffect(() => {
    active.push(keys);
    return () => {
      active.splice(active.indexOf(keys), 1);
    };
  }, deps);
}

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  const typing = event.target.matches?.("input, textarea, select");
  if (typing && event.key !== "Escape") return;
  if (event.target.closest?.("dialog") && event.key !== "?") return;
  // what is on top acts first: a view before the page around it
  for (const keys of [...active].reverse()) {
    const found = keys.find((entry) => [entry.key].flat().includes(event.key));
    if (found && found.run(event) !== false) {
      event.preventDefault();
      return;
    }
  }
});
