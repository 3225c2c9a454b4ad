"""Who asks, and what he may: identities from a file, one rule for each request, one gate that all
requests pass.

In: a token or the name of a certificate, the request's name and the namespace that it is about.
Out: nothing, or an error. What was refused and what an administrator did is written down (`audit`).
"""
