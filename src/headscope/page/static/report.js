// A saved report: the views that need no model.
import { start } from "./lib/frame.js";
import { ATLAS } from "./views/atlas.js";
import { HEAD } from "./views/head.js";

start([ATLAS, HEAD]);
