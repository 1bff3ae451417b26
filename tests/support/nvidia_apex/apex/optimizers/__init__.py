from .fused_adam import FusedAdam as FusedAdam
