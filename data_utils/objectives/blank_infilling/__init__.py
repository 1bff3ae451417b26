"""GLM's blank infilling: config.py: section; draw.py: spans; write.py: Examples; objective.py: class."""

from data_utils.objectives.blank_infilling.config import DOCUMENT, SENTENCE, TOKEN, BlankInfillingConfig
from data_utils.objectives.blank_infilling.draw import MOST_CUT
from data_utils.objectives.blank_infilling.objective import BlankInfilling

__all__ = ["DOCUMENT", "MOST_CUT", "SENTENCE", "TOKEN", "BlankInfilling", "BlankInfillingConfig"]
