"""Cards by name: what is known of them, and what runs where."""

import pytest
import torch
from support.tolerance import raises_with

from headwise import Shape, explain
from headwise.kernels.cards import CARDS, NAMES, card_of, shared_bytes
