"""Does a model of one's own keep its contract? `check_model(model, shape, task)` answers in one
line per rule, and `headwise check my_model.py` prints them."""

from __future__ import annotations

import pickle
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from headwise.errors import Finding, Note, Rule, UsageError, Wrong, findings, one_line
from headwise.rows import check_value

if TYPE_CHECKING:
    from headwise.model.own import Model
    from headwise.shape import Shape
    from headwise.tasks.task import Task

BATCH = 5


@dataclass(frozen=True)
class _Case:
    """A model, and what it is built for."""

    model: Model
    shape: Shape
    task: Task

    def built(self, seed: int = 0) -> nn.Module:
        """The module, its weights drawn from the global generator as for a run."""
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of layers of no width
            torch.manual_seed(seed)
            return self.model.build(self.shape, self.task)

    def inputs(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a small batch, the same at every call."""
        return self.task.sample(torch.Generator().manual_seed(1), BATCH)


def check_model(model: Model, shape: Shape, task: Task) -> list[Finding]:
    """One finding per rule of the contract, on a small shape and a task."""
    return findings(_Case(model, shape, task), RULES)


def check_first_output(model: Model, shape: Shape, task: Task) -> None:
    """Refuse a model that breaks the cheap part of the contract, before anything is trained."""
    for finding in findings(_Case(model, shape, task), FIRST_RULES):
        if finding.level == "wrong":
            raise UsageError(f"model {type(model).__name__}: {finding.text}")


def _builds_a_module(case: _Case) -> str:
    # The module itself, then its parameters and buffers: runs are trained and saved in float32.
    try:
        module = case.built()
    except NotImplementedError:
        raise Wrong("build is missing: write build(self, shape, task)") from None
    if not isinstance(module, nn.Module):
        raise Wrong(f"build must return a torch.nn.Module, got {type(module).__name__}")
    trained = [p for p in module.parameters() if p.requires_grad]
    if not trained:
        raise Wrong("the module must have parameters to train, got none")
    for name, tensor in module.named_parameters():
        if tensor.dtype != torch.float32:
            raise Wrong(f"parameters must be float32, {name} is {_word(tensor.dtype)}")
    for name, tensor in module.named_buffers():
        if tensor.dtype == torch.float64:
            raise Wrong(f"buffers must not be float64, {name} is")
    return f"{type(module).__name__}, {sum(p.numel() for p in trained):,} parameters"


def _answers_in_size(case: _Case) -> str:
    # The answer is read from the first `answer_dim` coordinates of every token, so (B, N, width)
    # may be wider but not narrower.
    inputs, _ = case.inputs()
    try:
        outputs = case.built()(inputs)
    except RuntimeError as e:
        if not case.task.vocab:
            raise
        raise Wrong(
            f"the module fails on token ids, which it must embed (vocab {case.task.vocab}): "
            f"{one_line(e)}"
        ) from None
    if not isinstance(outputs, Tensor):
        raise Wrong(f"the module must return one tensor, got {type(outputs).__name__}")
    task = case.task
    width = outputs.shape[-1] if outputs.ndim == 3 else 0
    if outputs.shape[:-1] != (BATCH, task.tokens) or width < task.answer_dim:
        raise Wrong(
            f"outputs must be (batch, tokens, width) = ({BATCH}, {task.tokens}, at least "
            f"{task.answer_dim}), got {tuple(outputs.shape)}"
        )
    if not outputs.is_floating_point() or outputs.dtype == torch.float64:
        raise Wrong(f"outputs must be float32, got {_word(outputs.dtype)}")
    if not bool(outputs.isfinite().all()):
        raise Wrong("outputs must be finite where training begins")
    return f"inputs {tuple(inputs.shape)} give outputs {tuple(outputs.shape)}"


def _is_drawn_from_the_seed(case: _Case) -> str:
    # Two builds of one seed must agree bit for bit; another seed should give other weights.
    first, again, other = (case.built(seed).state_dict() for seed in (3, 3, 4))
    for name, tensor in first.items():
        if not torch.equal(tensor, again[name]):
            raise Wrong(
                f"the initial weights must follow from torch's seed: {name} differs between two "
                "builds of one seed"
            )
    if all(torch.equal(tensor, other[name]) for name, tensor in first.items()):
        raise Note("every seed gives the same initial weights")
    return "one seed gives one set of initial weights"


def _counts_without_memory(case: _Case) -> str:
    count = case.model.params(case.shape, case.task)
    built = sum(p.numel() for p in case.built().parameters() if p.requires_grad)
    if count != built:
        raise Wrong(f"params must count what build makes, {built:,}, got {count:,}")
    return "counted on the meta device"


def _trains_every_parameter(case: _Case) -> str:
    # One backward pass of the task's own loss; a parameter without a gradient would never be
    # trained.
    module = case.built()
    inputs, targets = case.inputs()
    case.task.loss(module(inputs), targets).backward()
    parameters = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    for name, parameter in parameters:
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
            raise Wrong(f"gradients must be finite where training begins, that of {name} is not")
    unused = [name for name, parameter in parameters if parameter.grad is None]
    if unused:
        raise Wrong(f"every parameter must be used: {unused[0]} gets no gradient{_more(unused)}")
    return "each gets a finite gradient"


def _more(names: list[str]) -> str:
    return f", and {len(names) - 1} more" if len(names) > 1 else ""


def _evaluates(case: _Case) -> str:
    """Evaluated outputs are a function of a sequence alone."""
    # Once more the same, and the first sequence alone: dropout fails the first test, batch
    # statistics fail the second.
    module = case.built().eval()
    inputs, _ = case.inputs()
    with torch.no_grad():
        outputs, again, alone = module(inputs), module(inputs), module(inputs[:1])
    if not torch.equal(outputs, again):
        raise Wrong("after eval() the same inputs must give the same outputs: two calls differ")
    if not torch.allclose(outputs[:1], alone, rtol=1e-4, atol=1e-5):
        raise Wrong("after eval() a sequence's outputs must not depend on the others of its batch")
    if module.train().training is not True or any(not m.training for m in module.modules()):
        raise Wrong("train() must set the module and its children to training")
    return "after eval() outputs depend on the sequence alone"


def _hides_later_tokens(case: _Case) -> str:
    """A causal model's outputs do not change with later tokens."""
    if not (case.shape.causal or case.task.causal):
        return "not asked for: neither the shape nor the task is causal"
    module = case.built().eval()
    inputs, _ = case.inputs()
    # Only the last token is changed, so all outputs before it must stay as they are.
    changed = inputs.clone()
    changed[:, -1] += 1
    if case.task.vocab:
        changed[:, -1] %= case.task.vocab
    with torch.no_grad():
        before, after = module(inputs)[:, :-1], module(changed)[:, :-1]
    if not torch.allclose(before, after, rtol=1e-4, atol=1e-5):
        raise Wrong("shape and task are causal: outputs must not depend on later tokens, they do")
    return "outputs do not depend on later tokens"


def _is_saved_whole(case: _Case) -> str:
    """The state dict is the whole model: checkpoints and kept weights hold nothing else."""
    # Weights of one seed are loaded into a model of another. Whatever still differs lives outside
    # the state dict.
    module, other = case.built(3).eval(), case.built(4).eval()
    other.load_state_dict(module.state_dict())
    inputs, _ = case.inputs()
    with torch.no_grad():
        if not torch.equal(module(inputs), other(inputs)):
            raise Wrong(
                "the state dict must hold all that the outputs depend on: register tensors with "
                "nn.Parameter or register_buffer"
            )
    if pickle.loads(pickle.dumps(case.model)) != case.model:
        raise Wrong("a pickled model must be equal to the model")
    return "the state dict holds all weights"


def _is_a_value(case: _Case) -> str:
    check_value(case.model, "model")
    fields = {key: value for key, value in case.model.spec().items() if key != "name"}
    text = ", ".join(f"{key}={value!r}" for key, value in fields.items() if key != "version")
    return f"{case.model.spec()['name']}({text}), version {case.model.version}"


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


FIRST_RULES = (
    Rule("value", _is_a_value, needed=True),
    Rule("build", _builds_a_module, needed=True),
    Rule("outputs", _answers_in_size, needed=True),
)
RULES = (
    *FIRST_RULES,
    Rule("seed", _is_drawn_from_the_seed),
    Rule("params", _counts_without_memory),
    Rule("gradient", _trains_every_parameter),
    Rule("evaluation", _evaluates),
    Rule("causal", _hides_later_tokens),
    Rule("weights", _is_saved_whole),
)
