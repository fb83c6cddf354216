// What a view asks for again and again while it is looked at.
import { useEffect, useState } from "./vendor/htm-preact.js";
import { call } from "./api.js";

// The last answer, and why there is none. body: what is asked for; another one is asked for at once.
export function usePolled(name, body, everyMs) {
  const asked = JSON.stringify(body);
  const [seen, see] = useState({ asked: "" });
  useEffect(() => {
    const stop = new AbortController();
    let timer;
    const look = async () => {
      try {
        const answer = await call(name, body, stop.signal);
        see({ asked, answer });
      } catch (error) {
        if (!stop.signal.aborted) see((before) => ({ ...(before.asked === asked ? before : { asked }), error: error.message }));
      }
      if (!stop.signal.aborted) timer = setTimeout(look, everyMs);
    };
    look();
    return () => {
      stop.abort();
      clearTimeout(timer);
    };
  }, [name, asked, everyMs]);
  return seen.asked === asked ? seen : { asked };
}
