"""The EAGLE family: `drafter` and `parallel` propose, `head` is the module, `loss` trains it, `files` reads others'."""
