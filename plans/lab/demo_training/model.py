"""The demo model in PyTorch: Llama's layers with a dReLU feed-forward, small enough to train on two cores.

Parameter names are those of Hugging Face's Llama, so that `convert` reads the checkpoint.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclasses.dataclass(frozen=True)
class Shape:
    """The dimensions of the demo model, which has 11.1 M parameters."""

    vocabulary: int = 4096
    width: int = 320
    layers: int = 8
    neurons: int = 1024
    query_heads: int = 5
    key_heads: int = 1
    head_width: int = 64
    context_tokens: int = 512
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, computed in float32."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon) * self.weight


def rope_tables(shape: Shape) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each [context_tokens, head_width / 2]."""
    exponent = torch.arange(0, shape.head_width, 2) / shape.head_width
    angle = torch.outer(torch.arange(shape.context_tokens).float(), shape.rope_theta**-exponent)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [batch, heads, tokens, head_width] rotated by position; element j is paired with j + head_width / 2."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    """Causal attention with grouped key heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.width, shape.query_heads * shape.head_width, bias=False)
        self.k_proj = nn.Linear(shape.width, shape.key_heads * shape.head_width, bias=False)
        self.v_proj = nn.Linear(shape.width, shape.key_heads * shape.head_width, bias=False)
        self.o_proj = nn.Linear(shape.query_heads * shape.head_width, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, _ = x.shape

        def heads(y: Tensor, count: int) -> Tensor:
            return y.view(batch, tokens, count, self.shape.head_width).transpose(1, 2)

        q = rotate(heads(self.q_proj(x), self.shape.query_heads), cos, sin)
        k = rotate(heads(self.k_proj(x), self.shape.key_heads), cos, sin)
        v = heads(self.v_proj(x), self.shape.key_heads)
        group = self.shape.query_heads // self.shape.key_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        y = functional.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, tokens, -1))


class FeedForward(nn.Module):
    """A dReLU feed-forward: down(relu(gate x) * relu(up x))."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.neurons, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.neurons, bias=False)
        self.down_proj = nn.Linear(shape.neurons, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.hidden(x))

    def hidden(self, x: Tensor) -> Tensor:
        """Return the values of the neurons; 0 if a neuron did not fire."""
        return functional.relu(self.gate_proj(x)) * functional.relu(self.up_proj(x))


class Layer(nn.Module):
    """A pre-norm decoder layer with attention and dReLU feed-forward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.width, shape.norm_epsilon)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.width, shape.norm_epsilon)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class DemoModel(nn.Module):
    """The model: token ids [batch, tokens] to logits [batch, tokens, vocabulary]. Embeddings are tied."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.width, shape.norm_epsilon)
        cos, sin = rope_tables(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * shape.layers) ** (0.5 * deep))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return functional.linear(self.norm(x), self.embed_tokens.weight)

    def huggingface_config(self) -> dict[str, object]:
        s = self.shape
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "drelu",
            "hidden_size": s.width,
            "intermediate_size": s.neurons,
            "num_hidden_layers": s.layers,
            "num_attention_heads": s.query_heads,
            "num_key_value_heads": s.key_heads,
            "head_dim": s.head_width,
            "vocab_size": s.vocabulary,
            "max_position_embeddings": s.context_tokens,
            "rms_norm_eps": s.norm_epsilon,
            "rope_theta": s.rope_theta,
            "tie_word_embeddings": True,
            "eos_token_id": 0,
            "torch_dtype": "float32",
        }
