"use strict";
const text = document.getElementById("comparison").textContent;
const specs = JSON.parse(document.getElementById("specs").textContent);
const schemes = new Map(JSON.parse(text).schemes.map((result) => [result.about.name, result]));

const options = { config: specs.config, actions: false, renderer: "svg", tooltip: { theme: "page" } };

function specOf(element) {
  if (element.dataset.chart) return specs.charts[element.dataset.chart];
  return { ...specs.scatter, datasets: { points: schemes.get(element.dataset.points).order.points } };
}

async function draw(element) {
  try {
    await vegaEmbed(element, specOf(element), options);
    element.dataset.drawn = "yes";
  } catch (error) {
    element.textContent = `This chart could not be drawn: ${error.message}`;
    throw error;
  }
}

/** Settles when all charts are there. */
const drawn = Promise.all([...document.querySelectorAll(".chart")].map(draw));

document.getElementById("download").href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
document.getElementById("raw").addEventListener("toggle", (event) => {
  event.target.querySelector("pre").textContent = text;
});
