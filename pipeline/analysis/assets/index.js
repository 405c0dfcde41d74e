// Shows the graph of the link that was clicked, and the operators of the chosen stage; without JavaScript the links open
// in the frame all the same.
"use strict";
const links = Array.from(document.querySelectorAll("a[target=graph]"));
const shown = document.getElementById("shown");
const alone = document.getElementById("alone");
const chooser = document.getElementById("stage");
const analyses = Array.from(document.querySelectorAll(".analysis"));

function choose(stage) {
    if (!analyses.some((one) => one.dataset.stage === stage)) {
        return;
    }
    analyses.forEach((one) => {
        one.hidden = one.dataset.stage !== stage;
    });
    chooser.value = stage;
}

function mark(link) {
    links.forEach((other) => other.classList.toggle("current", other === link));
    shown.textContent = `Graph: ${link.dataset.stage}, ${link.textContent}`;
    alone.href = link.getAttribute("href");
    alone.hidden = false;
    choose(link.dataset.stage);
}

chooser.addEventListener("change", () => choose(chooser.value));
links.forEach((link) => link.addEventListener("click", () => mark(link)));
if (links.length) {
    const last = chooser.dataset.chosen;
    const first = links.find((link) => link.dataset.stage === last) || links[0];
    document.getElementById("graph").src = first.getAttribute("href");
    mark(first);
}
