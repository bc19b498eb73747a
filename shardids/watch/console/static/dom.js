// Makes elements and brings those on the page up to date. Whatever comes from data becomes text, never markup.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "g", "rect", "line", "path", "text", "title"]);

/** @typedef {any} Child a node, text, a number, a list of these; null and false are nothing */

/**
 * Makes an element: attributes by name, `on` with listeners, `style` with properties. Null and false are left out.
 *
 * @param {string} tag
 * @param {Record<string, any> | null} [attributes]
 * @param {...Child} children
 * @returns {HTMLElement}
 */
export function h(tag, attributes, ...children) {
  const element = SVG_TAGS.has(tag)
    ? /** @type {any} */ (document.createElementNS(SVG, tag))
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
      element.dataset.live = ""; // it has listeners: morph keeps or replaces it, whole
    } else if (name === "style") {
      for (const [property, set] of Object.entries(value)) element.style.setProperty(property, String(set));
    } else {
      element.setAttribute(name, value === true ? "" : String(value));
    }
  }
  append(element, children);
  return element;
}

/** @param {Element} element @param {Child[]} children */
function append(element, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) append(element, child);
    else element.append(child instanceof Node ? child : String(child));
  }
}

/**
 * Makes `parent` hold these children, and touches only what differs: the focus, the selection and the place that
 * was scrolled to stay. Elements with listeners are replaced whole, unless they are equal or have the same `data-key`.
 *
 * @param {Element} parent
 * @param {...Child} children
 */
export function show(parent, ...children) {
  const fresh = h("div", null, ...children);
  morph(parent, fresh);
}

/** @param {Element} old @param {Element} fresh */
function morph(old, fresh) {
  const wanted = [...fresh.childNodes];
  wanted.forEach((node, at) => {
    const there = old.childNodes[at];
    if (!there) old.append(node);
    else if (there === node || there.isEqualNode(node)) return;
    else if (alike(there, node)) update(/** @type {any} */ (there), /** @type {any} */ (node));
    else there.replaceWith(node);
  });
  while (old.childNodes.length > wanted.length) old.lastChild?.remove();
}

/** @param {Node} there @param {Node} node */
function alike(there, node) {
  if (there.nodeType !== node.nodeType || there.nodeName !== node.nodeName) return false;
  if (!(there instanceof Element) || !(node instanceof Element)) return true;
  const key = there.getAttribute("data-key");
  if (key !== node.getAttribute("data-key")) return false;
  return key !== null || (!there.hasAttribute("data-live") && !node.hasAttribute("data-live"));
}

/** @param {any} there @param {any} node */
function update(there, node) {
  if (!(there instanceof Element)) {
    there.data = node.data;
    return;
  }
  for (const { name } of [...there.attributes]) {
    if (!node.hasAttribute(name) && name !== "style" && name !== "open") there.removeAttribute(name);
  }
  for (const { name, value } of [...node.attributes]) {
    if (name !== "style" && there.getAttribute(name) !== value) there.setAttribute(name, value);
  }
  const style = /** @type {any} */ (there).style;
  if (style && style.cssText !== node.style.cssText) style.cssText = node.style.cssText;
  if (!there.hasAttribute("data-kept")) morph(there, node);
}

/** Returns the value of a custom property of the page, such as a colour. @param {string} name */
export function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Says something to readers of the screen. @param {string} words */
export function say(words) {
  const place = document.getElementById("said");
  if (place && place.textContent !== words) place.textContent = words;
}

/** Calls back when the system turns light or dark. Returns what ends it. @param {() => void} then */
export function onTheme(then) {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", then);
  return () => dark.removeEventListener("change", then);
}

/** Returns a line that can be copied. @param {string} text @param {string} [place] */
export function command(text, place) {
  return h("div", { class: "command" },
    h("pre", null, text),
    place ? h("span", { class: "place" }, place) : null,
    h("button", { type: "button", "data-copy": text, "aria-label": `Copy: ${text}` }, "Copy"));
}

/** Returns a table with headings. @param {string} caption @param {{title: string, class?: string, hint?: string}[]} columns
 *  @param {HTMLElement[]} rows @param {string} [kind] */
export function table(caption, columns, rows, kind) {
  return h("div", { class: "scroll", role: "group", "aria-label": caption, tabindex: "0" }, h("table", { class: kind },
    h("thead", null, h("tr", null, columns.map((column) => h("th", { scope: "col", class: column.class, title: column.hint }, column.title)))),
    h("tbody", null, rows)));
}

/** Returns a row of a table. @param {{title: string, class?: string}[]} columns @param {Child[]} row
 *  @param {Record<string, any>} [attributes] */
export function cells(columns, row, attributes) {
  return h("tr", attributes ?? null, row.map((cell, at) => at === 0
    ? h("th", { scope: "row", class: columns[0].class }, h("span", null, cell))
    : h("td", { class: columns[at].class, "data-label": columns[at].title }, h("span", null, cell))));
}
