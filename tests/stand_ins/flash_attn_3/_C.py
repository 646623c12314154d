"""Stands in for the extension of the package."""

from hopper_stand_in import register

library = register("flash_attn_3")
