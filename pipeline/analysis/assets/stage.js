// Hands the saved graph to DaCe's viewer, and begins at its top in a size that can be read.
"use strict";

// Pixels for one unit of the graph: below the first number the viewer hides labels.
const SMALLEST_SCALE = 0.9;
const LARGEST_SCALE = 1.4;

function showTop(renderer) {
    const elements = renderer.graph.nodes().map((id) => renderer.graph.node(id));
    const left = Math.min(...elements.map((element) => element.x - element.width / 2));
    const right = Math.max(...elements.map((element) => element.x + element.width / 2));
    const top = Math.min(...elements.map((element) => element.y - element.height / 2));
    const area = document.getElementById("contents");
    const scale = Math.min(LARGEST_SCALE, Math.max(SMALLEST_SCALE, area.clientWidth / (right - left)));
    const width = area.clientWidth / scale;
    const height = area.clientHeight / scale;
    const margin = 60 / scale; // the viewer's buttons
    renderer.canvas_manager.set_view(new DOMRect((left + right - width) / 2, top - margin, width, height), false);
    renderer.draw_async();
}

document.addEventListener("DOMContentLoaded", () => {
    const viewer = WebSDFV.getInstance();
    const show = () => {
        viewer.setSDFG(checkCompatLoad(parse_sdfg(savedGraph)), null, false);
        const waiting = setInterval(() => {
            const renderer = viewer.renderer;
            if (renderer && renderer.graph && renderer.graph.nodes().length && renderer.canvas_manager) {
                clearInterval(waiting);
                showHeat(renderer);
                setTimeout(() => showTop(renderer), 200);
                // Again, in case the canvas got its final size, which empties it, only after the first time.
                setTimeout(() => {
                    showTop(renderer);
                    document.body.dataset.shown = renderer.graph.nodes().length;
                }, 800);
            }
        }, 50);
    };
    if (viewer.initialized) {
        show();
    } else {
        viewer.on("initialized", show);
    }
});
