"""What PyTorch does to a function of tensors: every transform as one function that gives back
tensors, so that two attentions can be compared under each of them.

A transform takes `attend(q, k, v)` and its operands (batch, heads, tokens, width).
"""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, export
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint


def _leaves(tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


def _loss(f):
    return lambda *t: f(*t).double().square().sum()


# ---- torch.func


def over_batches(f, t):
    return vmap(f)(*(torch.stack((x, x + 0.5, x - 0.5)) for x in t))


def over_batches_with_shared_keys(f, t):
    q = torch.stack((t[0], t[0] + 0.5), 1)
    return vmap(f, in_dims=(1, None, None), out_dims=1)(q, *t[1:])


def gradients(f, t):
    return grad(_loss(f), (0, 1, 2))(*t)


def per_sample_gradients(f, t):
    stacked = [torch.stack((x, x + 0.5)) for x in t]
    return vmap(grad(_loss(f), (0, 1, 2)))(*stacked)


def pullback(f, t):
    y, back = vjp(f, *t)
    return back(torch.ones_like(y))


def jacobian_by_rows(f, t):
    return jacrev(lambda q: f(q, *t[1:]))(t[0])


def ensemble(f, t):
    """Models of an ensemble, each with weights of its own before the attention."""
    layer = torch.nn.Linear(t[0].shape[-1], t[0].shape[-1], dtype=t[0].dtype)
    weights = {n: torch.stack((p.detach(), p.detach() * 2)) for n, p in layer.named_parameters()}
    return vmap(lambda w: f(functional_call(layer, w, t[0]), *t[1:]))(weights)


def pushforward(f, t):
    return jvp(f, tuple(t), tuple(torch.ones_like(x) for x in t))


def jacobian_by_columns(f, t):
    return jacfwd(lambda q: f(q, *t[1:]))(t[0])


def second_derivatives(f, t):
    return hessian(lambda v: _loss(f)(t[0], v, t[2]))(t[1])


# ---- autograd


def backward(f, t):
    leaves = _leaves(t)
    return torch.autograd.grad(_loss(f)(*leaves), leaves)


def backward_twice(f, t):
    leaves = _leaves(t)
    first = torch.autograd.grad(_loss(f)(*leaves), leaves, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)


def batched_gradients(f, t):
    leaves = _leaves(t)
    y = f(*leaves)
    rows = torch.stack((torch.ones_like(y), 2 * y.detach()))
    return torch.autograd.grad(y, leaves, rows, is_grads_batched=True)


def recomputed(f, t):
    leaves = _leaves(t)
    y = checkpoint(f, *leaves, use_reentrant=False)
    return torch.autograd.grad(y.square().sum(), leaves)


def inference(f, t):
    with torch.inference_mode():
        return f(*t).clone()


def deterministic(f, t):
    torch.use_deterministic_algorithms(True)
    try:
        return backward(f, t)
    finally:
        torch.use_deterministic_algorithms(False)


def autocast(f, t):
    with torch.autocast("cpu", torch.bfloat16):
        return f(*t)


# ---- compilers and tracers


def _compiled(f, backend="eager", **options):
    torch._dynamo.reset()
    return torch.compile(f, fullgraph=True, backend=backend, **options)


def compiled(f, t):
    return backward(_compiled(f, "aot_eager"), t)


def compiled_for_any_size(f, t):
    return backward(_compiled(f, dynamic=True), t)


def compiled_for_two_sizes(f, t):
    """The second size makes the compiler ask for symbols."""
    g = _compiled(f)
    longer = [torch.cat((x, x[..., :2, :]), -2) for x in t]
    return g(*t), backward(g, longer), g(*(x[:1] for x in longer))


class _Module(torch.nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, q, k, v):
        return self.f(q, k, v)


def exported(f, t):
    return export(_Module(f), tuple(t)).module()(*t)


def exported_for_any_size(f, t):
    batch, tokens = Dim("batch", min=2, max=64), Dim("tokens", min=2, max=4096)
    sizes = ({0: batch, 2: tokens},) * 3
    program = export(_Module(f), tuple(t), dynamic_shapes=sizes)
    longer = [torch.cat((x, x[..., :2, :]), -2) for x in t]
    return program.module()(*t), program.module()(*longer)


def graph(f, t):
    return make_fx(f)(*t)(*t)


def symbolic_graph(f, t):
    return make_fx(f, tracing_mode="symbolic")(*t)(*t)


def traced(f, t):
    return torch.jit.trace(lambda *x: f(*x), tuple(t))(*t)


def fake(f, t):
    """Sizes without numbers."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        y = f(*(mode.from_tensor(x) for x in t))
    return torch.zeros(y.shape, dtype=y.dtype)


def meta(f, t):
    y = f(*(x.to("meta") for x in t))
    return torch.zeros(y.shape, dtype=y.dtype)


TRANSFORMS = (
    over_batches, over_batches_with_shared_keys, gradients, per_sample_gradients, pullback,
    jacobian_by_rows, ensemble, pushforward, jacobian_by_columns, second_derivatives,
    backward, backward_twice, batched_gradients, recomputed, inference, deterministic, autocast,
    compiled, compiled_for_any_size, compiled_for_two_sizes, exported, exported_for_any_size,
    graph, symbolic_graph, traced, fake, meta,
)  # fmt: skip
COMPILED = (
    compiled, compiled_for_any_size, compiled_for_two_sizes, exported, exported_for_any_size,
    symbolic_graph,
)  # fmt: skip


def result(transform, f, tensors):
    """The tensors of a transform in one list, or its error."""
    torch.manual_seed(3)
    try:
        return _flat(transform(f, tensors))
    except Exception as error:
        return error


def _flat(found):
    if isinstance(found, torch.Tensor):
        return [found.detach()]
    return [t for part in found for t in _flat(part)]
