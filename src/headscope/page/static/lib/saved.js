// A saved report has no server: the file carries the answers to all questions about its atlas (see page/onefile.py).
import { bytes, matrix } from "./wire.js";

const element = document.getElementById("answers");

export const saved = element !== null;

let answers;
async function unpacked() {
  const text = new Blob([bytes(element.textContent)]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(text).json();
}

// The answer to a GET, or undefined where the file has none.
export async function answerOf(url) {
  answers ??= unpacked();
  const { documents, matrices } = await answers;
  return Object.hasOwn(matrices, url) ? matrix(bytes(matrices[url]).buffer) : documents[url];
}
