"""What a model is made of, for tests that it stays the same."""

from torch.nn.modules.batchnorm import _BatchNorm


def structure(model):
    """Everything that has a name, and which object or value it is."""
    return {
        "tensors": [(n, id(t)) for n, t in (*model.named_parameters(), *model.named_buffers())],
        "keys": list(model.state_dict()),
        "modules": [(name, id(module)) for name, module in model.named_modules()],
        "values": [(t.device, t.dtype, t.requires_grad) for t in model.state_dict().values()],
        "training": [module.training for module in model.modules()],
        "options": [
            (m.num_features, m.eps, m.momentum, m.affine, m.track_running_stats)
            for m in model.modules()
            if isinstance(m, _BatchNorm)
        ],
    }


def attributes(model):
    """Types and attributes of all layers, down to the objects they hold."""
    return [(type(m), {k: id(v) for k, v in vars(m).items()}) for m in model.modules()]


def norms(model):
    return [m for m in model.modules() if isinstance(m, _BatchNorm)]
