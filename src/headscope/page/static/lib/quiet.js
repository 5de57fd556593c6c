// A value that follows another once that has been quiet for a while: a slider asks when it rests.
import { useEffect, useState } from "./ui.js";

export function useQuiet(value, ms) {
  const [quiet, set] = useState(value);
  useEffect(() => {
    const timer = setTimeout(() => set(value), ms);
    return () => clearTimeout(timer);
  }, [value, ms]);
  return quiet;
}
