"""Provide the names of `kvstore.page_hmac` under its former name, with a deprecation warning."""

import warnings

from kvstore.page_hmac import PageHmacs as Seals
from kvstore.page_hmac import PageKeys
from kvstore.page_hmac import SignedRanges as SealedRanges
from kvstore.page_hmac import hmac_nbytes as seal_nbytes

__all__ = ["PageKeys", "SealedRanges", "Seals", "seal_nbytes"]

warnings.warn("kvstore.seals is now kvstore.page_hmac", DeprecationWarning, stacklevel=2)
