"""The page of `sparkonce ui`: every transaction of a log, in a browser; an extra: `sparkonce[ui]`.

    browser ─► access: token, host ─► app: routes ─► views, provenance ─► facts ─► the log
                                         └─► templates, which escape everything

It reads and never writes: nobody is fenced. Each page asks the log for a bounded number of records.
"""
