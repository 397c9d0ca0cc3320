"""What inference engines return, as rows that a :class:`~tracefile.TraceWriter` takes.

:mod:`~tracefile.engines.payload` turns bytes into arrays, :mod:`~tracefile.engines.forms` knows the form of each
engine, and :mod:`~tracefile.engines.rows` says which rows and layers of a sample they are. Nothing here does I/O,
and nothing is ever unpickled.
"""

from tracefile.engines.forms import EngineName
from tracefile.engines.rows import EngineRows, decode

__all__ = ["decode", "EngineRows", "EngineName"]
