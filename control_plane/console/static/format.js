// Figures and names as people read them. Every time here is a duration that the router has measured: the clock of the
// browser's host is asked for nothing.

export function seconds(value) {
  if (value === undefined || value === null) return "–";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 90) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  if (value < 5400) return `${(value / 60).toFixed(0)} min`;
  return value < 172_800 ? `${(value / 3600).toFixed(1)} h` : `${(value / 86_400).toFixed(0)} days`;
}

export const ms = (value) => (value === undefined || value === null ? "–" : seconds(value / 1000));

export function count(value) {
  const number = Number(value);
  if (number >= 10_000_000) return `${(number / 1e6).toFixed(0)} M`;
  return number >= 100_000 ? `${(number / 1e3).toFixed(0)} k` : number.toLocaleString("en");
}

// POOL_DECODE, POOL_PHASE_READY, WORKER_STATE_DRAINING: the last word of it.
export const word = (name) => name.replace(/^(POOL_PHASE|POOL|WORKER_STATE)_/, "").toLowerCase().replaceAll("_", " ");

export const plural = (number, one, many = `${one}s`) => `${count(number)} ${Number(number) === 1 ? one : many}`;

export const share = (part, whole) => (whole ? Math.min(1, part / whole) : 0);

export const percent = (value) => `${(value * 100).toFixed(0)}%`;
