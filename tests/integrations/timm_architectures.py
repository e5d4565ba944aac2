"""Architectures of timm that are tested with continual norm, and the table of docs/integrations/timm.md.

``python -m tests.integrations.timm_architectures`` writes the table.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "integrations" / "timm.md"
BEGIN, END = "<!-- architectures: begin -->", "<!-- architectures: end -->"

How = Literal["name", "class", "conversion"]
TITLES: dict[How, str] = {
    "name": '`create_model(..., norm_layer="cn")`',
    "class": '`create_model(..., norm_layer=partial(ContinualNorm2d, num_groups="auto"))`',
    "conversion": '`convert_norm(model, "cn", num_groups="auto")`',
}


@dataclass(frozen=True)
class Architecture:
    """An architecture, how all its norms become continual norms, and the size of the images to test it with."""

    name: str
    how: How
    size: int = 64
    options: dict[str, Any] = field(default_factory=dict)  # of create_model, to make it small


ARCHITECTURES = (
    *(
        Architecture(name, "name")
        for name in (
            "resnet10t",
            "resnetv2_18",
            "regnety_002",
            "efficientnet_b0",
            "mobilenetv2_035",
            "densenet121",
            "repvgg_a0",
            "convnext_atto",
            "mobilevit_xxs",
            "test_efficientnet_gn",
        )
    ),
    Architecture("inception_v3", "name", 80),
    Architecture("xception41", "class", 32),
    *(
        Architecture(name, "conversion")
        for name in (
            "skresnet18",
            "mobilenetv3_small_050",
            "mobilenetv4_conv_small_035",
            "hrnet_w18_small",
            "efficientvit_b0",
            "test_byobnet",
        )
    ),
    Architecture("vgg11_bn", "conversion", 32, {"mlp_ratio": 1 / 64}),
    Architecture("levit_128s", "conversion", 224),
    Architecture("coatnet_pico_rw_224", "conversion", 64, {"img_size": 64}),
)


def table() -> str:
    """Return the table of the page: the architectures of each way."""
    rows = [f"| {len(ARCHITECTURES)} architectures | how |", "|---|---|"]
    for how, title in TITLES.items():
        names = ", ".join(f"`{each.name}`" for each in ARCHITECTURES if each.how == how)
        rows.append(f"| {names} | {title} |")
    return "\n".join(rows)


def replace_table(page: str) -> str:
    return re.sub(f"{BEGIN}.*{END}", lambda match: f"{BEGIN}\n{table()}\n{END}", page, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(replace_table(PAGE.read_text()))
