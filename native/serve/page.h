/* page.h — the status page, embedded. */
#ifndef CB_SERVE_PAGE_H
#define CB_SERVE_PAGE_H

extern const char cb_page_html[];
extern const unsigned cb_page_html_bytes;

#endif
