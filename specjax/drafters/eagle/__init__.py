"""The EAGLE family: `drafter` proposes, `head` is the module, `loss` trains it, `tree` grows trees, `files` reads others'."""
