"""The lies that `folder_connector.py` can tell."""

LIES = {
    "wrong block": "a page is loaded into the block behind its own",
    "swapped layers": "a layer gets the page of the next layer",
    "nothing loaded": "a hit is reported and nothing is loaded",
    "last block missing": "the last block of a hit is not loaded",
    "off by one": "a hit is one block longer than what is stored",
    "no chain": "a page is named by its own tokens, not by all before it",
    "adapter ignored": "a page is named by tokens only, whatever the LoRA",
    "media ignored": "a page is named by tokens only, whatever the sound",
    "saved too early": "a page is saved before it is computed",
    "loaded too late": "a load is reported done, and ends after the step that needs it",
    "one layer missing": "one layer of the first block of a hit is not loaded",
    "older prompt": "a page is named by its place and the prompt's length, and kept",
    "wrong if preempted": "a preempted request gets the pages in front of its own",
    "late after abort": "the load of an aborted request is reported done, and ends later",
    "swapped states": "a recurrent state is that of the block before",
    "state of null": "a state is saved at each boundary, also where none was kept",
}
# Lies that only a model with recurrent states, a LoRA or sounds shows.
OF_STATES = ("swapped states", "state of null")
OF_ADAPTERS = ("adapter ignored",)
OF_MEDIA = ("media ignored",)
