"""Cleaning of text in stores: the output of local files, their fields and records, and nowhere a secret."""

import json
import os
import signal
import time

import pytest
from support import cleaning
from support.cleaning import tree
from support.commands import Forked, assert_refused, forked
from support.stores import COMMIT, serving
from support.waiting import wait_until
