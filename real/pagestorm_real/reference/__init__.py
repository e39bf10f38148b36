"""The engines' own memory and scheduling code as referees.

Each engine lives in an environment of its own (`environment.py`) and is spoken to over pipes (`client.py` on this
side, `serving.py` on that side, `protocol.py` on both). Pagestorm never imports an engine.
"""
