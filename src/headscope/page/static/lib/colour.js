// One scale for everything signed: the background at exactly 0, blue above, red below, symmetric limits. Blue and red
// (rather than green and red) stay apart for colour-blind readers; negative cells are also struck through.
const STOPS = {
  light: { up: [[255, 255, 255], [116, 169, 214], [8, 64, 129]], down: [[255, 255, 255], [236, 141, 112], [150, 20, 24]] },
  dark: { up: [[24, 29, 38], [46, 104, 176], [176, 214, 255]], down: [[24, 29, 38], [172, 76, 44], [255, 205, 180]] },
};

export function rgb(t, theme) {
  const stops = STOPS[theme][t < 0 ? "down" : "up"];
  const place = Math.min(1, Math.abs(t)) * 2;
  const [a, b] = place < 1 ? [stops[0], stops[1]] : [stops[1], stops[2]];
  const share = place < 1 ? place : place - 1;
  return [0, 1, 2].map((i) => Math.round(a[i] + (b[i] - a[i]) * share));
}

export const css = (t, theme) => `rgb(${rgb(t, theme).join(",")})`;

// Whether text on that colour is better in the opposite of the usual ink.
export const strong = (t, theme) => Math.abs(t) > (theme === "dark" ? 0.55 : 0.67);

// 256 colours of [0, 1] as 32-bit pixels, for images of many cells.
export function pixels(theme) {
  const table = new Uint32Array(256);
  for (let i = 0; i < 256; i++) {
    const [r, g, b] = rgb(i / 255, theme);
    table[i] = (255 << 24) | (b << 16) | (g << 8) | r;
  }
  return table;
}

export function limit(values) {
  let most = 0;
  for (const value of values) if (Math.abs(value) > most) most = Math.abs(value);
  return most || 1;
}

export const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
