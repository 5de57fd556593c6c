// Preact with htm: components are functions, text is always a text node.
import { h, render, Fragment } from "preact";
import { useEffect, useLayoutEffect, useMemo, useRef, useState, useCallback } from "preact/hooks";
import htm from "htm";

export const html = htm.bind(h);
export { render, Fragment, useEffect, useLayoutEffect, useMemo, useRef, useState, useCallback };
