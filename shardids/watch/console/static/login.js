// Logs in without leaving the page, to say there why a token was refused.

const form = /** @type {HTMLFormElement} */ (document.getElementById("login"));
const said = /** @type {HTMLElement} */ (document.getElementById("said"));

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const body = new URLSearchParams({ token: String(new FormData(form).get("token") ?? "") });
  const answer = await fetch(form.action, { method: "POST", body }).catch(() => null);
  if (answer?.ok) {
    location.assign(new URL(".", document.baseURI));
    return;
  }
  const refused = await answer?.json().catch(() => null);
  said.textContent = refused ? `${refused.error}. ${refused.hint ?? ""}` : "The console's server does not answer.";
  form.querySelector("input")?.select();
});
