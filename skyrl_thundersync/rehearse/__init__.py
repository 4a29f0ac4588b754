"""`skyrl rehearse`: the learner's own code at a configuration's real size, without data. Nothing else imports it."""
