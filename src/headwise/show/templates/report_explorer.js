"use strict";
// The explorer in a frame of its own, made when it is asked for: most readers only want the answer.
// Its scripts are those that the page's policy names.

const explore = document.getElementById("explore");

function openExplorer() {
  const frame = element("iframe", { title: "Explorer: move the shape", class: "explorer" });
  const coloured = () => { frame.style.colorScheme = isDark() ? "dark" : "light"; };
  coloured();
  redrawn.push(coloured);
  frame.srcdoc = page.explorer;
  document.getElementById("frame").append(frame);
}

explore?.addEventListener("click", () => {
  const frame = document.querySelector("#frame iframe");
  if (frame) frame.hidden = !frame.hidden;
  else openExplorer();
  const shown = !document.querySelector("#frame iframe").hidden;
  explore.setAttribute("aria-expanded", shown);
  explore.textContent = shown ? "Close the explorer" : "Open the explorer";
});

// On a phone a long list of experiments would stand before the first answer.
const contents = document.getElementById("contents");
if (contents && narrow.matches) contents.open = false;
