// One prompt: its tokens, what comes next, the route by which the prediction came about, and what each layer would say.
import { html, useEffect, useMemo, useRef, useState } from "../lib/ui.js";
import { hrefWith, useAddress } from "../lib/address.js";
import { post, useAsk } from "../lib/api.js";
import { css } from "../lib/colour.js";
import { useWidth } from "../lib/heat.js";
import { useKeys } from "../lib/keys.js";
import { LensTable, columnsFor } from "../lib/lens.js";
import { Failure, Token, Waiting } from "../lib/parts.js";
import { Save } from "../lib/save.js";
import { useTheme } from "../lib/theme.js";
import { percent, signed, visible } from "../lib/text.js";
import { RoutePanel } from "./route.js";

const EXAMPLE = "When Mary and John went to the store, John gave a drink to";

const whole = (text) => (text !== null && /^\d+$/.test(text) ? Number(text) : null);

// What the address asks; see Question in app/prompt.py.
function asked(address) {
  const threshold = Number(address.get("threshold"));
  return {
    prompt: address.get("prompt") || "",
    more: (address.get("more") || "").split(".").filter((id) => /^\d+$/.test(id)).map(Number),
    position: whole(address.get("pos")),
    target: whole(address.get("target")),
    foil: address.get("foil") === "none" ? -1 : whole(address.get("foil")),
    threshold: threshold > 0 ? threshold : 0.04,
    biases: address.get("biases") || "part",
  };
}

export const PROMPT = { name: "Prompt", path: /^\/prompt$/, href: "/prompt", key: "p", does: "a prompt", View: PromptView };

function PromptView({ server }) {
  const address = useAddress();
  const question = asked(address);
  const { prompt, more, position, target, foil } = question;
  const [draft, setDraft] = useState(prompt || EXAMPLE);
  useEffect(() => {
    if (prompt) setDraft(prompt);
  }, [prompt]);
  const found = useAsk("/api/prompt/look", prompt ? { prompt, more, position, target, foil } : null);
  const told = found.value;
  const run = (event) => {
    event?.preventDefault();
    address.set({ prompt: draft, ...(draft === prompt ? {} : NOTHING), more: null });
  };
  const last = told ? told.tokens.length - 1 : 0;
  // a chosen token goes with the prediction it was chosen for
  const choose = (p) => address.set({ pos: p === last ? null : p, target: null, foil: null, on: null });
  const append = (id) => address.set({ ...NOTHING, more: [...more, id].join(".") });
  const back = () => address.set({ ...NOTHING, more: more.slice(0, -1).join(".") });
  const ready = told && !found.stale;
  // of the answer that is shown, which lags behind the address while the model works
  const shown = told && found.of;
  useKeys([
    { key: "ArrowLeft", does: "the token before", run: () => ready && told.position > 0 && choose(told.position - 1) },
    { key: "ArrowRight", does: "the next token", run: () => ready && told.position < last && choose(told.position + 1) },
    { key: "n", does: "add the model’s next token", run: () => ready && told.position === last && append(told.next[0].id) },
    { key: "b", does: "take the last added token back", run: () => (more.length ? back() : false) },
    { key: "[ ]", does: "edges into a state (in the route)", run: () => false },
    { key: "+ - 0", does: "larger, smaller, whole (in the route)", run: () => false },
    { key: "Escape", does: "release what is locked", run: () => (address.get("on") || address.get("cell") ? address.set({ on: null, cell: null }) : false) },
  ]);

  return html`
    <header class="title"><h1>How a prediction comes about</h1></header>
    <section class="panel">
      <form class="prompt" onSubmit=${run}>
        <textarea rows="2" aria-label="Prompt" maxlength="20000" spellcheck=${false} value=${draft} onInput=${(e) => setDraft(e.target.value)}
          onKeyDown=${(e) => e.key === "Enter" && (e.ctrlKey || e.metaKey) && run(e)}></textarea>
        <button class="primary" title="Ctrl-Enter">Look</button>
      </form>
      ${!prompt && html`<p class="soft">Shows what comes next, the route by which the prediction came about, and what each layer would say.${server?.state === "waiting" ? " The first look loads the model." : ""}</p>`}
      ${found.error && html`<${Failure} error=${found.error} />`}
      ${found.loading && !told && html`<${Waiting}>${server?.state === "waiting" ? "Loading the model and looking …" : "Looking …"}<//>`}
      ${told && html`<div class=${found.stale ? "stale" : ""}>
        <${Tokens} tokens=${told.tokens} position=${told.position} added=${shown.more.length} onChoose=${choose} />
        <div class="row">
          <button disabled=${told.position !== last} title="n" onClick=${() => append(told.next[0].id)}>Add the next token <${Token} text=${told.position === last ? told.next[0].token : " "} /></button>
          ${more.length > 0 && html`<button title="b" onClick=${back}>Take it back</button> <span class="soft">${more.length} added, step by step</span>`}
          ${told.position !== last && html`<button onClick=${() => choose(last)}>To the last token</button>`}
          <a class="button" href=${hrefWith({ prompt: told.text }, "/try", "")}>Try edits on it</a>
        </div>
      </div>`}
    </section>
    ${told && html`
      <div class=${`columns next ${found.stale ? "stale" : ""}`}>
        <${Next} told=${told} last=${last} address=${address} append=${append} />
        <${LensPanel} question=${shown} told=${told} address=${address} choose=${choose} />
      </div>
      <${RoutePanel} question=${question} told=${told} address=${address} />`}
  `;
}

// What is chosen within a prompt, all of it released.
const NOTHING = { pos: null, target: null, foil: null, on: null, cell: null, lens: null };

function Tokens({ tokens, position, added, onChoose }) {
  const box = useRef();
  useEffect(() => {
    // only the list scrolls, never the page
    const chosen = box.current.querySelector(".query");
    if (chosen) box.current.scrollTop = chosen.offsetTop - box.current.offsetTop - box.current.clientHeight / 2;
  }, [position, tokens]);
  const buttons = useMemo(
    () => tokens.map((token, i) => html`<button key=${i} class=${`${i === position ? "query" : ""} ${i >= tokens.length - added ? "added" : ""}`} aria-pressed=${i === position} title=${`position ${i}`} onClick=${() => onChoose(i)}>${visible(token)}</button>`),
    [tokens, position, added],
  );
  return html`<p class="looked tokens-row" ref=${box}>${buttons}</p>
    <p class="soft">${tokens.length} tokens; below is what follows the one in the frame. Click another, or walk with ← and →.</p>`;
}

function Next({ told, last, address, append }) {
  const theme = useTheme();
  const most = told.next[0].p;
  const goal = (name, id) => address.set({ [name]: id, on: null });
  const mark = (name, row, is) => html`<button class=${`mini ${is ? "on" : ""}`} aria-pressed=${is} title=${name === "target" ? "Explain this token" : "Explain why not this token"}
    onClick=${() => goal(name, is ? (name === "foil" ? "none" : null) : row.id)}>${name}</button>`;
  return html`<section class="panel"><h2>After <${Token} text=${told.tokens[told.position]} /> <small class="soft">position ${told.position}</small></h2>
    <p>Why <${Token} text=${told.target.token} /> <small class="soft">${percent(told.target.p)}, number ${told.target.rank}</small>
      ${told.foil ? html` rather than <${Token} text=${told.foil.token} /> <small class="soft">${percent(told.foil.p)}, number ${told.foil.rank}</small>: logits differ by <b>${signed(told.difference, 2)}</b>` : html`: logit <b>${signed(told.difference, 2)}</b>`}</p>
    <${OtherTokens} onGoal=${goal} />
    <div class="tall"><table class="tokens next-tokens"><thead class="sr"><tr><th>token</th><th>probability</th><th>choose</th></tr></thead><tbody>${told.next.map((row) => html`<tr key=${row.id}>
      <td><${Token} text=${row.token} /></td>
      <td class="n"><span class="bar" style=${{ width: `${(row.p / most) * 54}px`, background: css(0.55, theme) }}></span> ${percent(row.p)}</td>
      <td class="n">${mark("target", row, row.id === told.target.id)} ${mark("foil", row, row.id === told.foil?.id)}
        ${told.position === last && html`<button class="mini" title="Add this token to the prompt" onClick=${() => append(row.id)}>add</button>`}</td></tr>`)}</tbody></table></div>
  </section>`;
}

function OtherTokens({ onGoal }) {
  const [text, setText] = useState("");
  const [error, setError] = useState(null);
  const take = (name) => {
    setError(null);
    post("/api/prompt/token", { text }).then((found) => (setText(""), onGoal(name, found.id)), (failed) => setError(failed.message));
  };
  return html`<form class="row" onSubmit=${(e) => (e.preventDefault(), text && take("target"))}>
    <input aria-label="Another token" placeholder="another token" size="12" maxlength="100" value=${text} spellcheck=${false} autocomplete="off" onInput=${(e) => setText(e.target.value)} />
    <button disabled=${!text}>as target</button><button type="button" disabled=${!text} onClick=${() => take("foil")}>as foil</button>
    <button type="button" class="plain small" onClick=${() => onGoal("foil", "none")}>no foil</button>
    ${text && html`<small class="soft"><code class="token">${visible(text)}</code></small>`}
    ${error && html`<${Failure} error=${error} />`}
  </form>`;
}

// A file has the whole prompt, or as much of a long one as can be read, from where the table is.
const MOST_COLUMNS = 64;
const drawn = (total, start) => (total <= MOST_COLUMNS ? { start: 0, stop: total } : { start: Math.min(start, total - MOST_COLUMNS), stop: Math.min(total, start + MOST_COLUMNS) });

function LensPanel({ question, told, address, choose }) {
  const box = useRef();
  const width = useWidth(box);
  const total = told.tokens.length;
  const n = Math.min(total, columnsFor(width));
  const given = whole(address.get("lens"));
  // around the chosen position, unless the reader moved the table
  const start = Math.max(0, Math.min(total - n, given ?? Math.max(0, told.position - n + 1)));
  const { prompt, more, position } = question;
  const found = useAsk("/api/prompt/lens", width ? { prompt, more, position, target: told.target.id, start, stop: start + n } : null);
  const by = address.get("colour") === "target" ? "target" : "best";
  const cell = /^(\d+)@(\d+)$/.exec(address.get("cell") || "");
  const locked = cell && { level: Number(cell[1]), position: Number(cell[2]) };
  const lock = (at) => address.set({ cell: locked && at.level === locked.level && at.position === locked.position ? null : `${at.level}@${at.position}` });
  const lens = found.value;
  const fits = lens && lens.stop <= total;
  return html`<section class="panel"><h2>Logit lens</h2>
    <p class="soft">What each layer’s stream would predict through the final norm and the unembedding, if it were the last. A frame: it is the target <${Token} text=${told.target.token} />.</p>
    <div class="row">
      <label class="soft">Colour: probability of <select value=${by} onChange=${(e) => address.set({ colour: e.target.value === "best" ? null : "target" })}>
        <option value="best" selected=${by === "best"}>the best token</option><option value="target" selected=${by === "target"}>the target</option></select></label>
      ${n < total && html`<span class="soft">positions ${start} to ${start + n - 1} of ${total}</span>
        <button class="small" disabled=${start === 0} onClick=${() => address.set({ lens: Math.max(0, start - n) })}>earlier</button>
        <button class="small" disabled=${start + n >= total} onClick=${() => address.set({ lens: start + n })}>later</button>
        ${given !== null && html`<button class="small" onClick=${() => address.set({ lens: null })}>to the chosen one</button>`}`}
      <${Save} what="the logit lens" of=${{ of: "lens", prompt, more, position, target: told.target.id, by, ...drawn(total, start) }} />
    </div>
    ${found.error && html`<${Failure} error=${found.error} />`}
    <div ref=${box}>
      ${!lens && found.loading && html`<${Waiting}>Reading every layer …<//>`}
      ${fits && html`<div class=${found.stale ? "stale" : ""}><${LensTable} lens=${lens} tokens=${told.tokens} width=${width} position=${told.position} by=${by} locked=${locked} onLock=${lock} onPosition=${choose} /></div>`}
    </div>
  </section>`;
}
