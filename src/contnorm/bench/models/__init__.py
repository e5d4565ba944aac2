"""Networks of the benchmark: names and one-line summaries here, without torch; `build` builds them."""

from __future__ import annotations

NETWORKS: dict[str, str] = {
    "mlp": "two hidden layers, for digits",
    "resnet18": "ResNet-18 with a 3x3 stem, for small images",
    "resnet34": "ResNet-34 with a 7x7 stem, for photographs; takes torchvision's and timm's weights",
    "resnet50": "ResNet-50, the same",
    "resnet101": "ResNet-101, the same",
}
