"""FusedAdam: the step count is the group's, a group has parameters, and moments exist if the state is not empty."""

import torch


class FusedAdam(torch.optim.Optimizer):
    def __init__(
        self,
        params,
        lr=1e-3,
        bias_correction=True,
        betas=(0.9, 0.999),
        eps=1e-8,
        adam_w_mode=True,
        weight_decay=0.0,
        amsgrad=False,
        set_grad_none=True,
        capturable=False,
        master_weights=False,
    ):
        assert adam_w_mode and not (amsgrad or capturable or master_weights)
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    def zero_grad(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @torch.no_grad()
    def step(self, closure=None, grads=None, output_params=None, scale=None, grad_norms=None):
        assert all(argument is None for argument in (closure, grads, output_params, scale, grad_norms))
        for group in self.param_groups:
            assert group["params"][0].dtype == torch.float32  # an empty group is an IndexError
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                update(parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"], group)


def update(parameter, gradient, first, second, group):
    """The kernel's order of operations, which is not that of torch's AdamW."""
    (beta1, beta2), step = group["betas"], group["step"]
    corrections = (1 - beta1**step, 1 - beta2**step) if group["bias_correction"] else (1.0, 1.0)
    first.copy_(beta1 * first + (1 - beta1) * gradient)
    second.copy_(beta2 * second + (1 - beta2) * gradient * gradient)
    change = (first / corrections[0]) / ((second / corrections[1]).sqrt() + group["eps"])
    parameter.sub_(group["lr"] * (change + group["weight_decay"] * parameter))
