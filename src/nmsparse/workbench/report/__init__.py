"""One self-contained HTML file, and CSV, from the folders that training runs leave behind."""

from nmsparse.workbench.report._summary import SummaryTable, summarize
from nmsparse.workbench.report._write import ReportFiles, write_report

__all__ = ["ReportFiles", "SummaryTable", "summarize", "write_report"]
