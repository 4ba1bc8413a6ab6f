data "aws_iam_policy_document" "endpoint" {
  count = var.gateway_endpoint == null ? 0 : 1

  # What may pass; who may do it is said by iam.tf.
  dynamic "statement" {
    for_each = local.express ? [1] : []

    content {
      sid       = "Session"
      actions   = ["s3express:CreateSession"]
      resources = [local.bucket_arn]

      principals {
        type        = "*"
        identifiers = ["*"]
      }
    }
  }

  dynamic "statement" {
    for_each = local.express ? [] : [1]

    content {
      sid       = "List"
      actions   = ["s3:ListBucket"]
      resources = [local.bucket_arn]

      principals {
        type        = "*"
        identifiers = ["*"]
      }
    }
  }

  dynamic "statement" {
    for_each = local.express ? [] : [1]

    content {
      sid       = "Objects"
      actions   = local.object_actions.cleaner
      resources = [local.objects_arn]

      principals {
        type        = "*"
        identifiers = ["*"]
      }
    }
  }

  # ECR keeps the layers of images in a bucket of its own. Without this no pod starts any more.
  dynamic "statement" {
    for_each = local.express ? [] : [1]

    content {
      sid       = "ImageLayers"
      actions   = ["s3:GetObject"]
      resources = ["arn:${local.partition}:s3:::prod-${local.region}-starport-layer-bucket/*"]

      principals {
        type        = "*"
        identifiers = ["*"]
      }
    }
  }

  dynamic "statement" {
    for_each = length(var.gateway_endpoint.extra_bucket_names) == 0 ? [] : [1]

    content {
      sid     = "ExtraBuckets"
      actions = ["s3:GetObject", "s3:ListBucket"]
      resources = flatten([
        for name in var.gateway_endpoint.extra_bucket_names :
        ["arn:${local.partition}:s3:::${name}", "arn:${local.partition}:s3:::${name}/*"]
      ])

      principals {
        type        = "*"
        identifiers = ["*"]
      }
    }
  }
}

resource "aws_vpc_endpoint" "this" {
  count = var.gateway_endpoint == null ? 0 : 1

  vpc_id            = var.gateway_endpoint.vpc_id
  route_table_ids   = var.gateway_endpoint.route_table_ids
  vpc_endpoint_type = "Gateway"
  service_name      = "com.amazonaws.${local.region}.${local.express ? "s3express" : "s3"}"
  policy            = data.aws_iam_policy_document.endpoint[0].json
  tags              = merge(local.tags, { Name = local.bucket_name })
}
