"""GLM's blank infilling: config.py: section; spans.py: draws and Examples; objective.py: class."""

from data_utils.objectives.blank_infilling.config import DOCUMENT, SENTENCE, TOKEN, BlankInfillingConfig
from data_utils.objectives.blank_infilling.objective import BlankInfilling
from data_utils.objectives.blank_infilling.spans import MOST_CUT

__all__ = ["DOCUMENT", "MOST_CUT", "SENTENCE", "TOKEN", "BlankInfilling", "BlankInfillingConfig"]
