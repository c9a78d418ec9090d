from fastbcd.scoring.collapsed.form import drop_form as drop  # noqa: F401
