"""torchvision's models at reduced sizes, against plain reverse mode."""

import pytest
import torch
from jacobians import check
from tiny import draw

models = pytest.importorskip("torchvision.models")
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")


def resnet18():
    model = models.resnet18(num_classes=2)
    for wide in (model.layer3, model.layer4):  # most of the weights, for speed
        wide.requires_grad_(False)
    return model


def mobilenet():
    from torchvision.models.mobilenetv3 import InvertedResidualConfig, MobileNetV3

    def block(*sizes, use_se, activation):
        return InvertedResidualConfig(*sizes, use_se, activation, 2, 1, 0.25)

    blocks = [
        block(16, 3, 16, 16, use_se=True, activation="RE"),
        block(16, 5, 32, 16, use_se=True, activation="HS"),
    ]
    return MobileNetV3(blocks, last_channel=16, num_classes=2)


def convnext():
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt([CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 1)], num_classes=2)


def vit():
    return models.VisionTransformer(8, 4, 2, 2, 8, 16, num_classes=2)


def swin():
    return models.SwinTransformer([2, 2], 8, [2, 1], [1, 2], [2, 2], num_classes=2)


@pytest.mark.parametrize(
    ("build", "size"), [(resnet18, 32), (mobilenet, 32), (convnext, 32), (vit, 8), (swin, 16)]
)
@pytest.mark.parametrize("selection", [None, "last_layer"])
@pytest.mark.slow
def test_torchvision(build, size, selection):
    torch.manual_seed(0)
    report = check(build().double().train(), draw(2, 3, size, size), selection)
    assert report.path.forward and report.factors
