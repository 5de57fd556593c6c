// d3 and Observable Plot, loaded when the first chart is drawn.
import "../vendor/d3.js";
import "../vendor/plot.js";

export const { d3, Plot } = globalThis;
