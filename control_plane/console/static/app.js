// The page: which view is shown, whether the router answers, and who looks.
import { html, render, useCallback, useEffect, useState } from "./vendor/htm-preact.js";
import { call, key, Refused, stream } from "./api.js";
import { seconds } from "./format.js";
import { KeyForm } from "./key_form.js";
import { Decode } from "./views/decode.js";
import { Now } from "./views/now.js";
import { Placement } from "./views/placement.js";
import { Pools } from "./views/pools.js";
import { Prefixes } from "./views/prefixes.js";
import { Requests } from "./views/requests.js";

const VIEWS = { now: Now, requests: Requests, pools: Pools, decode: Decode, placement: Placement, prefixes: Prefixes };
const WORKERS = 200;
const FIRST_RETRY_MS = 1000;
const LAST_RETRY_MS = 15_000;
const ACCESS = ["UNAUTHENTICATED", "PERMISSION_DENIED"];

// What stands behind the hash: the view, and what is opened in it.
function place() {
  const [view, ...rest] = location.hash.slice(1).split("/");
  return { view: view in VIEWS ? view : "now", opened: rest.length ? decodeURIComponent(rest.join("/")) : "" };
}

// Follows the router until the page is left: {state: connecting | live | lost | key, overview, who, why, retryMs}.
function useRouter() {
  const [seen, see] = useState({ state: "connecting" });
  const [turn, again] = useState(0);
  useEffect(() => {
    const stop = new AbortController();
    let timer;
    let retryMs = FIRST_RETRY_MS;
    const follow = async () => {
      let why = "it has ended the connection";
      try {
        const who = await call("GetIdentity", {}, stop.signal);
        const onMessage = ({ overview }) => {
          retryMs = FIRST_RETRY_MS;
          see({ state: "live", overview, who });
        };
        await stream("WatchOverview", { workers: WORKERS }, onMessage, { signal: stop.signal });
      } catch (error) {
        if (stop.signal.aborted) return;
        if (error instanceof Refused && ACCESS.includes(error.status)) {
          see({ state: "key", why: error.message, isWrong: error.status === "UNAUTHENTICATED" });
          return;
        }
        why = error instanceof Refused ? error.message : "it does not answer";
      }
      if (stop.signal.aborted) return;
      const waitMs = retryMs * (0.75 + Math.random() / 2);
      see((before) => ({ ...before, state: "lost", why, retryMs: waitMs }));
      retryMs = Math.min(LAST_RETRY_MS, retryMs * 2);
      timer = setTimeout(follow, waitMs);
    };
    follow();
    return () => {
      stop.abort();
      clearTimeout(timer);
    };
  }, [turn]);
  return [seen, useCallback(() => again((before) => before + 1), [])];
}

function Console() {
  const [at, go] = useState(place);
  const [router, reconnect] = useRouter();
  useEffect(() => {
    const follow = () => go(place());
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  useEffect(() => {
    document.title = `${at.view} – Rachis console`;
  }, [at.view]);
  const leave = () => {
    key.write("");
    reconnect();
  };
  return html`
    <a class="skip" href="#main" onClick=${(event) => (event.preventDefault(), document.getElementById("main").focus())}>To the content</a>
    <header>
      <p class="title">Rachis</p>
      <nav aria-label="Views">
        ${Object.keys(VIEWS).map((view) => html`<a href=${`#${view}`} aria-current=${view === at.view ? "page" : undefined}>${view}</a>`)}
      </nav>
      <${Connection} router=${router} onLeave=${leave} />
    </header>
    <main id="main" tabindex="-1"><${Content} at=${at} router=${router} onKey=${reconnect} /></main>
  `;
}

function Content({ at, router, onKey }) {
  if (router.state === "key") return html`<${KeyForm} why=${router.why} isWrong=${router.isWrong} onKey=${onKey} />`;
  if (!router.overview) return html`<p>${router.state === "lost" ? "The router does not answer." : "Asking the router …"}</p>`;
  const mayOperate = router.who.roles.includes("operate");
  return html`<${VIEWS[at.view]} overview=${router.overview} opened=${at.opened} mayOperate=${mayOperate} isLive=${router.state === "live"} />`;
}

function Connection({ router, onLeave }) {
  const said = {
    connecting: "connecting",
    live: "live",
    lost: `the router is gone: ${router.why}. Shown is what it said last; next try in ${seconds((router.retryMs ?? 0) / 1000)}`,
    key: "a key is needed",
  }[router.state];
  return html`<p class=${`connection ${router.state}`}>
    <span role="status">${said}</span>
    ${router.who && !router.who.is_open ? html`<span class="who">${router.who.name}</span><button class="quiet" onClick=${onLeave}>Leave</button>` : null}
  </p>`;
}

render(html`<${Console} />`, document.getElementById("console"));
