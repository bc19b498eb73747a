// Lines over time by uPlot, in the page's colours.

import { css, onTheme } from "./dom.js";
import { clock, rate, short } from "./format.js";
import uPlot from "./vendor/uplot/uPlot.esm.js";

const FONT = "12px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";

/**
 * Draws lines that share a time axis, in a place whose width they follow.
 *
 * @param {HTMLElement} place
 * @param {{height: number, legend: boolean}} wish
 */
export function lines(place, wish) {
  /** @type {any} */ let plot = null;
  let drawn = "";
  /** @type {number[][]} */ let data = [];

  const axis = () => ({
    stroke: () => css("--soft"), font: FONT, ticks: { show: false },
    grid: { stroke: () => css("--line"), width: 1 },
  });

  /** @param {{name: string, colour: string, dash?: number[]}[]} series */
  function make(series) {
    plot?.destroy();
    plot = new (/** @type {any} */ (uPlot))({
      width: Math.max(place.clientWidth, 200),
      height: wish.height,
      legend: { show: wish.legend, live: true },
      cursor: { points: { size: 7 }, drag: { x: false, y: false }, y: false },
      scales: { y: { range: (/** @type {any} */ _, /** @type {number} */ low, /** @type {number} */ high) => [0, Math.max(high * 1.08, 1)] } },
      axes: [
        { ...axis(), space: 70, size: 30, values: (/** @type {any} */ _, /** @type {number[]} */ at) => at.map((s) => clock(s).slice(0, at.length > 1 && at[1] - at[0] < 60 ? 8 : 5)) },
        { ...axis(), size: 58, values: (/** @type {any} */ _, /** @type {number[]} */ at) => at.map((x) => short(x)) },
      ],
      series: [
        { label: "Time", value: (/** @type {any} */ _, /** @type {number | null} */ at) => at === null || at === undefined ? "–" : clock(at) },
        ...series.map((one) => ({
          label: one.name, stroke: () => css(one.colour), dash: one.dash, width: 1.6, spanGaps: false, points: { show: false },
          value: (/** @type {any} */ _, /** @type {number | null} */ value) => rate(value),
        })),
      ],
    }, data, place);
  }

  const stop = onTheme(() => plot?.redraw(false));
  const watcher = new ResizeObserver(() => {
    if (plot && place.clientWidth && place.clientWidth !== plot.width) plot.setSize({ width: place.clientWidth, height: wish.height });
  });
  watcher.observe(place);
  return {
    /** @param {number[]} times @param {{name: string, colour: string, dash?: number[], values: (number | null)[]}[]} series */
    draw(times, series) {
      data = /** @type {any} */ ([times, ...series.map((one) => one.values)]);
      const wanted = JSON.stringify(series.map((one) => [one.name, one.colour]));
      if (wanted !== drawn || !plot) {
        drawn = wanted;
        make(series);
      } else {
        plot.setData(data);
      }
    },
    end() {
      stop();
      watcher.disconnect();
      plot?.destroy();
    },
  };
}
