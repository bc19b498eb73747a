// The canvas of the map: a cell for each shard, rows of a round number of them, outlines of regions.

import { css } from "./dom.js";

const LABEL = 46;
const SMALLEST = 9;
const LARGEST = 44;
const NUMBERED = 30;

/**
 * How the cells are laid out in a place: rows that begin at round numbers, cells as large as the place allows, but
 * not so small that no finger finds them.
 *
 * @param {number} shards
 * @param {number} width of the place, in px
 * @param {number} height that can be seen at once, in px
 */
export function layout(shards, width, height) {
  const room = Math.max(width - LABEL - 2, 64);
  let best = { columns: 8, cell: 0, rows: 1, left: LABEL };
  for (const columns of [8, 16, 32, 64, 128]) {
    if (columns > Math.max(16, shards)) break;
    const rows = Math.ceil(shards / columns);
    const fits = Math.min(Math.floor(room / columns), Math.max(SMALLEST, Math.floor(height / rows)), LARGEST);
    if (fits >= best.cell) best = { columns, cell: fits, rows, left: LABEL };
  }
  return best;
}

/**
 * @param {HTMLCanvasElement} canvas
 * @param {{columns: number, cell: number, rows: number, left: number}} grid
 * @param {{shards: number, colouring: import("./map_colours.js").Colouring, only: string | null,
 *   region: (number | null)[] | undefined, at: number | null, open: number | null}} what
 */
export function draw(canvas, grid, what) {
  const { columns, cell, rows, left } = grid;
  const scale = devicePixelRatio || 1;
  const width = left + columns * cell + 2;
  const height = rows * cell + 3;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const pen = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  drawLabels(pen, grid);
  drawCells(pen, grid, what);
  if (what.region?.some((region) => region !== null)) drawRegions(pen, grid, what.region, what.shards);
  for (const [shard, colour, line] of /** @type {[number | null, string, number][]} */ ([[what.open, "--card", 5], [what.open, "--ink", 2.5], [what.at, "--card", 4], [what.at, "--ink", 1.5]])) {
    if (shard === null) continue;
    pen.strokeStyle = css(colour);
    pen.lineWidth = line;
    pen.strokeRect(left + (shard % columns) * cell + 0.5, Math.floor(shard / columns) * cell + 1, cell, cell);
  }
}

/** @param {CanvasRenderingContext2D} pen @param {ReturnType<typeof layout>} grid */
function drawLabels(pen, { columns, cell, rows, left }) {
  pen.fillStyle = css("--faint");
  pen.font = "11px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  const every = Math.max(1, 2 ** Math.ceil(Math.log2(18 / cell)));
  for (let row = 0; row < rows; row += every) pen.fillText(String(row * columns), left - 8, row * cell + cell / 2 + 2);
}

/** @param {CanvasRenderingContext2D} pen @param {ReturnType<typeof layout>} grid @param {any} what */
function drawCells(pen, { columns, cell, left }, { shards, colouring, only }) {
  const gap = cell >= 14 ? 2 : 1;
  const box = cell - gap;
  const colours = colouring.groups.map((/** @type {any} */ group) => css(group.colour));
  const ink = css("--paper");
  const dark = colours.map((/** @type {string} */ colour) => isDark(colour));
  pen.font = "11px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  for (let shard = 0; shard < shards; shard += 1) {
    const group = colouring.of[shard];
    const x = left + (shard % columns) * cell + 1;
    const y = Math.floor(shard / columns) * cell + 1.5;
    pen.globalAlpha = only !== null && colouring.groups[group]?.key !== only ? 0.16 : 1;
    pen.fillStyle = colours[group];
    pen.fillRect(x, y, box, box);
    if (colouring.groups[group]?.mark) { // a stripe, so that colour alone tells nothing
      pen.strokeStyle = ink;
      pen.lineWidth = Math.max(1.2, box / 7);
      pen.beginPath();
      pen.moveTo(x, y + box);
      pen.lineTo(x + box, y);
      pen.stroke();
    }
    if (cell >= NUMBERED) {
      pen.fillStyle = dark[group] ? "#ffffff" : "#10151c";
      pen.fillText(String(shard), x + box / 2, y + box / 2 + 0.5);
    }
  }
  pen.globalAlpha = 1;
}

/** Whether white can be read on a colour. @param {string} colour as #rrggbb */
function isDark(colour) {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return 0.299 * red + 0.587 * green + 0.114 * blue < 140;
}

/** Draws a line wherever neighbours are of different regions. @param {CanvasRenderingContext2D} pen
 *  @param {ReturnType<typeof layout>} grid @param {(number | null)[]} region @param {number} shards */
function drawRegions(pen, { columns, cell, left }, region, shards) {
  pen.strokeStyle = css("--ink");
  pen.lineWidth = 1.5;
  pen.beginPath();
  const of = (/** @type {number} */ shard) => (shard < 0 || shard >= shards ? null : region[shard] ?? null);
  for (let shard = 0; shard < shards; shard += 1) {
    const column = shard % columns;
    const x = left + column * cell + 0.5;
    const y = Math.floor(shard / columns) * cell + 1;
    const edges = /** @type {[number | null, number, number, number, number][]} */ ([
      [column ? of(shard - 1) : null, x, y, x, y + cell],
      [column + 1 < columns ? of(shard + 1) : null, x + cell, y, x + cell, y + cell],
      [of(shard - columns), x, y, x + cell, y],
      [of(shard + columns), x, y + cell, x + cell, y + cell],
    ]);
    if (of(shard) === null) continue;
    for (const [other, x1, y1, x2, y2] of edges) {
      if (other === of(shard)) continue;
      pen.moveTo(x1, y1);
      pen.lineTo(x2, y2);
    }
  }
  pen.stroke();
}

/** Returns the shard at a point of the canvas, or null. @param {ReturnType<typeof layout>} grid @param {number} shards
 *  @param {number} x @param {number} y */
export function shardAt({ columns, cell, left }, shards, x, y) {
  const column = Math.floor((x - left) / cell);
  const shard = Math.floor((y - 1) / cell) * columns + column;
  return column < 0 || column >= columns || y < 0 || shard >= shards || shard < 0 ? null : shard;
}
