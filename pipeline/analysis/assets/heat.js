// Bytes on the edges: what each moves as colour, width and text. The page's graph carries them in "stepdown_bytes".
"use strict";

const COLD = [180, 192, 204];
const WARM = [255, 196, 60];
const HOT = [214, 40, 40];
// Below this many pixels for one unit of the graph texts would only be dots.
const TEXT_SCALE = 0.55;

function heatColour(share) {
    // The largest containers are hundreds of times as large as the smallest ones: the root keeps those apart.
    const heat = Math.sqrt(share);
    const [from, to, place] = heat < 0.4 ? [COLD, WARM, heat / 0.4] : [WARM, HOT, (heat - 0.4) / 0.6];
    const mixed = from.map((value, channel) => Math.round(value + (to[channel] - value) * place));
    return `rgb(${mixed.join(",")})`;
}

function bytesText(bytes) {
    const power = bytes < 1000 ? 0 : Math.min(4, Math.floor(Math.log10(bytes) / 3));
    const scaled = bytes / 1000 ** power;
    return `${power ? scaled.toPrecision(3) : scaled} ${["", "k", "M", "G", "T"][power]}B`;
}

function middleOf(points) {
    const half = Math.floor((points.length - 1) / 2);
    const [one, other] = [points[half], points[Math.min(half + 1, points.length - 1)]];
    return { x: (one.x + other.x) / 2, y: (one.y + other.y) / 2 };
}

class MovedBytes {
    static type = "EDGE";

    constructor(renderer) {
        this.renderer = renderer;
        this.olClass = MovedBytes;
        this.refresh();
    }

    refresh() {
        this.edges = [];
        this.collect(this.renderer.graph);
        this.largest = Math.max(0, ...this.edges.map(([, bytes]) => bytes));
    }

    // Edges of the outermost states only: what is inside a kernel is not moved between kernels.
    collect(graph) {
        for (const id of graph.nodes()) {
            const inner = graph.node(id).data.graph;
            if (!inner) {
                continue;
            }
            for (const key of inner.edges()) {
                const edge = inner.edge(key);
                const bytes = edge.data && edge.data.attributes && edge.data.attributes.stepdown_bytes;
                if (bytes && edge.points && edge.points.length > 1) {
                    this.edges.push([edge, bytes]);
                }
            }
        }
    }

    on_mouse_event() {
        return false;
    }

    draw() {
        const context = this.renderer.get_context();
        const view = this.renderer.get_visible_rect();
        const scale = 1 / this.renderer.canvas_manager.points_per_pixel();
        context.save();
        for (const [edge, bytes] of this.edges) {
            if (edge.intersect(view.x, view.y, view.w, view.h)) {
                const share = bytes / this.largest;
                context.beginPath();
                edge.create_arrow_line(context);
                context.strokeStyle = heatColour(share);
                context.lineWidth = 1.5 + 5 * Math.sqrt(share);
                context.stroke();
            }
        }
        if (scale >= TEXT_SCALE) {
            context.font = "9px sans-serif";
            context.textAlign = "center";
            context.textBaseline = "middle";
            for (const [edge, bytes] of this.edges) {
                const place = middleOf(edge.points);
                const text = bytesText(bytes);
                const width = context.measureText(text).width + 6;
                context.fillStyle = "rgba(255,255,255,0.88)";
                context.fillRect(place.x - width / 2, place.y - 6, width, 12);
                context.fillStyle = "#1b2126";
                context.fillText(text, place.x, place.y);
            }
        }
        context.restore();
    }
}

function showHeat(renderer) {
    const overlay = new MovedBytes(renderer);
    document.body.dataset.edges = overlay.edges.length;
    if (!overlay.edges.length) {
        return;
    }
    const heat = document.getElementById("heat");
    heat.hidden = false;
    heat.querySelector("b").textContent = bytesText(overlay.largest);
    const box = document.getElementById("bytes");
    const apply = () => {
        heat.hidden = !box.checked;
        if (box.checked) {
            renderer.overlayManager.register_overlay_instance(overlay);
        } else {
            renderer.overlayManager.deregister_overlay(MovedBytes);
        }
    };
    box.addEventListener("change", apply);
    apply();
}
