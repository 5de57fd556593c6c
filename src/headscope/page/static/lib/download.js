// A file that the server made, into the reader's downloads.
import { bytes } from "./wire.js";

export function download({ name, text, base64 }) {
  const content = base64 ? bytes(base64) : text;
  const url = URL.createObjectURL(new Blob([content], { type: "application/octet-stream" }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.dispatchEvent(new MouseEvent("click")); // not in the page, so that its links' own handler does not take it
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}
