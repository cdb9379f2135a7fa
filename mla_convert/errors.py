"""Errors the package raises on purpose. Each message names the thing, the values, and the remedy."""

from __future__ import annotations


class MlaConvertError(ValueError):
    """Base of every error this package raises on purpose; the command line prints it without a traceback."""


class UnsupportedSource(MlaConvertError):
    """The source model has a feature, config key or tensor that no conversion step accounts for."""


class BadCheckpoint(MlaConvertError):
    """The files of a checkpoint are missing, damaged, contradict each other, or hold NaN or inf."""


class BadOption(MlaConvertError):
    """An option of a recipe is impossible by itself or for this source."""


class TargetExists(MlaConvertError):
    """The output folder exists and is not empty, and overwriting was not asked for."""
