// Dark and light follow the system until the reader switches; canvases ask for the colours in force.
import { useEffect, useState } from "./ui.js";

const system = matchMedia("(prefers-color-scheme: dark)");
const listeners = new Set();
const tell = () => listeners.forEach((listener) => listener());

export const chosen = () => document.documentElement.dataset.theme || "system";
export const effective = () => (chosen() === "system" ? (system.matches ? "dark" : "light") : chosen());

export function choose(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("headscope-theme", theme);
  } catch {
    // storage may be switched off; then the choice lasts as long as the page
  }
  tell();
}

try {
  const kept = localStorage.getItem("headscope-theme");
  if (kept === "dark" || kept === "light") document.documentElement.dataset.theme = kept;
} catch {
  // as above
}
system.addEventListener("change", tell);

export function useTheme() {
  const [theme, set] = useState(effective());
  useEffect(() => {
    const listener = () => set(effective());
    listeners.add(listener);
    return () => listeners.delete(listener);
  }, []);
  return theme;
}
