// Numbers, sizes and times as the page writes them. What is not known is a dash.

export const UNKNOWN = "–";
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenths = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const hundredths = new Intl.NumberFormat("en", { maximumFractionDigits: 2 });

/** @param {number | null | undefined} value */
const missing = (value) => value === null || value === undefined || Number.isNaN(value);

/** A count, all its digits. @param {number | null | undefined} value */
export const count = (value) => missing(value) ? UNKNOWN : whole.format(/** @type {number} */ (value));

/** A number in a few digits: 0.4, 17, 1,234, 56.7 k, 1.23 M. @param {number | null | undefined} value */
export function short(value) {
  if (missing(value)) return UNKNOWN;
  const number = /** @type {number} */ (value);
  const size = Math.abs(number);
  if (size < 10) return tenths.format(number);
  if (size < 9999.5) return whole.format(number);
  if (size < 999_950) return `${tenths.format(number / 1e3)} k`;
  if (size < 999_995_000) return `${hundredths.format(number / 1e6)} M`;
  return `${hundredths.format(number / 1e9)} G`;
}

/** IDs per second. @param {number | null | undefined} value */
export const rate = (value) => missing(value) ? UNKNOWN : `${short(value)}/s`;

/** @param {number | null | undefined} value */
export function bytes(value) {
  if (missing(value)) return UNKNOWN;
  let left = /** @type {number} */ (value);
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (Math.abs(left) < 1000) return `${left < 10 && unit !== "B" ? tenths.format(left) : whole.format(left)} ${unit}`;
    left /= 1000;
  }
  return `${tenths.format(left)} TB`;
}

/** A span of time, with its sign. @param {number | null | undefined} seconds */
export function span(seconds) {
  if (missing(seconds)) return UNKNOWN;
  const value = /** @type {number} */ (seconds);
  const size = Math.abs(value);
  const sign = value < 0 ? "−" : "";
  if (size < 1e-3) return "0 ms";
  if (size < 1) return `${sign}${whole.format(size * 1000)} ms`;
  if (size < 10) return `${sign}${tenths.format(size)} s`;
  if (size < 90) return `${sign}${whole.format(size)} s`;
  if (size < 5400) return `${sign}${whole.format(size / 60)} min`;
  if (size < 172_800) return `${sign}${whole.format(size / 3600)} h`;
  if (size < 63_072_000) return `${sign}${whole.format(size / 86_400)} days`;
  return `${sign}${whole.format(size / 31_557_600)} years`;
}

/** How far ticks are ahead of a clock, in words: those of an idle shard are behind it. @param {number} seconds */
export const lead = (seconds) => seconds < -86_400 ? "idle" : Math.abs(seconds) < 5e-4 ? "none" : seconds > 0 ? `${span(seconds)} ahead` : `${span(-seconds)} behind`;

/** How long ago; what is below zero is still to come. @param {number | null | undefined} seconds */
export function ago(seconds) {
  if (missing(seconds)) return "never";
  const value = /** @type {number} */ (seconds);
  if (Math.abs(value) < 1.5) return "just now";
  return value < 0 ? `in ${span(-value)}` : `${span(value)} ago`;
}

const pad = (/** @type {number} */ value, width = 2) => String(value).padStart(width, "0");

/** A moment in UTC, to the millisecond. @param {number} seconds since 1970 */
export function utc(seconds) {
  const date = new Date(Math.round(seconds * 1000));
  return Number.isNaN(date.getTime()) ? UNKNOWN : `${date.toISOString().replace("T", " ").replace("Z", "")} UTC`;
}

/** The same moment on this machine's clock, with its zone. @param {number} seconds */
export function local(seconds) {
  const date = new Date(Math.round(seconds * 1000));
  if (Number.isNaN(date.getTime())) return UNKNOWN;
  const zone = -date.getTimezoneOffset();
  const at = `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())} ${clock(seconds)}.${pad(date.getMilliseconds(), 3)}`;
  return `${at} ${zone < 0 ? "−" : "+"}${pad(Math.trunc(Math.abs(zone) / 60))}:${pad(Math.abs(zone) % 60)}`;
}

/** The time of day on this machine's clock. @param {number} seconds */
export function clock(seconds) {
  const date = new Date(seconds * 1000);
  return `${pad(date.getHours())}:${pad(date.getMinutes())}:${pad(date.getSeconds())}`;
}

/** The day and the minute on this machine's clock. @param {number | null | undefined} seconds */
export function minute(seconds) {
  if (missing(seconds)) return UNKNOWN;
  const date = new Date(/** @type {number} */ (seconds) * 1000);
  return `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())} ${pad(date.getHours())}:${pad(date.getMinutes())}`;
}

/** One of some things, or several: 1 node, 2 nodes. @param {number} number @param {string} one @param {string} [many] */
export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;
