"""GLM's blank infilling: config.py is its section, draw.py places spans, write.py writes, objective.py is the class."""

from data_utils.objectives.blank_infilling.config import DOCUMENT, SENTENCE, TOKEN, BlankInfillingConfig
from data_utils.objectives.blank_infilling.draw import MOST_CUT
from data_utils.objectives.blank_infilling.objective import BlankInfilling

__all__ = ["DOCUMENT", "MOST_CUT", "SENTENCE", "TOKEN", "BlankInfilling", "BlankInfillingConfig"]
