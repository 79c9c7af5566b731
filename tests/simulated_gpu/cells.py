"""Operations that the CPU has under another name, and the fused cells of recurrent layers."""

import torch

aten = torch.ops.aten


def _nothing():
    return torch.empty(0, device="cpu")


def convolution(x, weight, padding, stride, dilation, groups, *flags):
    return aten.convolution(
        x, weight, None, stride, padding, dilation, False, [0] * len(padding), groups
    )


def _with_bias(gates, bias):
    return gates if bias is None else gates + bias


def lstm_cell(inputs, hidden, cx, input_bias=None, hidden_bias=None):
    gates = _with_bias(inputs, input_bias) + _with_bias(hidden, hidden_bias)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def lstm_cell_backward(grad_hy, grad_cy, cx, cy, workspace, has_bias):
    i, f, g, o = workspace.chunk(4, 1)
    grad_hy = torch.zeros_like(cy) if grad_hy is None else grad_hy
    grad_c = grad_hy * o * (1 - cy.tanh() ** 2) + (0 if grad_cy is None else grad_cy)
    parts = (
        grad_c * g * i * (1 - i),
        grad_c * cx * f * (1 - f),
        grad_c * i * (1 - g**2),
        grad_hy * cy.tanh() * o * (1 - o),
    )
    gates = torch.cat(parts, 1)
    return gates, grad_c * f, gates.sum(0) if has_bias else _nothing()


def gru_cell(inputs, hidden, hx, input_bias=None, hidden_bias=None):
    inputs, hidden = _with_bias(inputs, input_bias), _with_bias(hidden, hidden_bias)
    (ir, iz, inew), (hr, hz, hnew) = inputs.chunk(3, 1), hidden.chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (inew + r * hnew).tanh()
    return n + z * (hx - n), torch.cat([r, z, n, hx, hnew], 1)


def gru_cell_backward(grad, workspace, has_bias):
    r, z, n, hx, hnew = workspace.chunk(5, 1)
    gz, gn = grad * (hx - n) * z * (1 - z), grad * (1 - z) * (1 - n**2)
    gr = gn * hnew * r * (1 - r)
    inputs, hidden = torch.cat([gr, gz, gn], 1), torch.cat([gr, gz, gn * r], 1)
    sums = (inputs.sum(0), hidden.sum(0)) if has_bias else (_nothing(), _nothing())
    return inputs, hidden, grad * z, *sums


REPLACEMENTS = {
    "cudnn_convolution": convolution,
    "_thnn_fused_lstm_cell": lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": lstm_cell_backward,
    "_thnn_fused_gru_cell": gru_cell,
    "_thnn_fused_gru_cell_backward": gru_cell_backward,
}
