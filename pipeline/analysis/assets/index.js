// Shows the graph of the link that was clicked below the table; without JavaScript the links open in the frame all the same.
"use strict";
const links = Array.from(document.querySelectorAll("a[target=graph]"));
const shown = document.getElementById("shown");
const alone = document.getElementById("alone");

function mark(link) {
    links.forEach((other) => other.classList.toggle("current", other === link));
    shown.textContent = `${link.dataset.stage}, ${link.textContent}`;
    alone.href = link.getAttribute("href");
    alone.hidden = false;
}

links.forEach((link) => link.addEventListener("click", () => mark(link)));
if (links.length) {
    const first = links.find((link) => link.textContent === "forward") || links[0];
    document.getElementById("graph").src = first.getAttribute("href");
    mark(first);
}
