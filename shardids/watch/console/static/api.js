// Asks the server. Addresses are relative, so that the console works under any path.

/** What the server refused, with what to do about it. */
export class ApiError extends Error {
  /** @param {string} message @param {string} hint @param {number} status 0 if there was no answer */
  constructor(message, hint, status) {
    super(message);
    this.hint = hint;
    this.status = status;
  }
}

/** @param {string} path @param {RequestInit} [options] @returns {Promise<any>} */
async function ask(path, options) {
  let answer;
  try {
    answer = await fetch(new URL(`api/${path}`, document.baseURI), { credentials: "same-origin", ...options });
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new ApiError("the console's server does not answer", "Is `shardids console` still running?", 0);
  }
  const body = await answer.json().catch(() => null);
  if (answer.ok && body !== null) return body;
  if (answer.status === 401) {
    location.assign(new URL("login", document.baseURI));
    return new Promise(() => {}); // the page is about to go
  }
  const said = body && typeof body.error === "string" ? body : { error: `the server answered ${answer.status}`, hint: "" };
  throw new ApiError(said.error, said.hint ?? "", answer.status);
}

/** @param {string} path @param {AbortSignal} [signal] */
export const get = (path, signal) => ask(path, { signal });

/** @param {string} path @param {object} body @param {AbortSignal} [signal] */
export const post = (path, body, signal) => ask(path, {
  method: "POST",
  headers: { "Content-Type": "application/json", "X-Shardids-Action": "1" },
  body: JSON.stringify(body),
  signal,
});
